window.occupancyData = {
 "amd": {
  "gfx908": {
   "target": "gfx908",
   "name": "MI100",
   "cus": 120,
   "wave_size": 64,
   "waves_per_simd": 10,
   "vgprs": 256,
   "vgpr_unit": 4,
   "agprs": 256,
   "lds": 65536,
   "lds_per_group": 65536,
   "lds_unit": 512,
   "groups": 16,
   "sgpr_waves": [
    [
     80,
     10
    ],
    [
     88,
     9
    ],
    [
     100,
     8
    ],
    [
     1000000000,
     7
    ]
   ],
   "simds": 4,
   "most_vgprs": 512
  },
  "gfx90a": {
   "target": "gfx90a",
   "name": "MI250X",
   "cus": 110,
   "wave_size": 64,
   "waves_per_simd": 8,
   "vgprs": 512,
   "vgpr_unit": 8,
   "agprs": 0,
   "lds": 65536,
   "lds_per_group": 65536,
   "lds_unit": 512,
   "groups": 16,
   "sgpr_waves": [
    [
     80,
     10
    ],
    [
     88,
     9
    ],
    [
     100,
     8
    ],
    [
     1000000000,
     7
    ]
   ],
   "simds": 4,
   "most_vgprs": 512
  },
  "gfx942": {
   "target": "gfx942",
   "name": "MI300X",
   "cus": 304,
   "wave_size": 64,
   "waves_per_simd": 8,
   "vgprs": 512,
   "vgpr_unit": 8,
   "agprs": 0,
   "lds": 65536,
   "lds_per_group": 65536,
   "lds_unit": 512,
   "groups": 16,
   "sgpr_waves": [
    [
     80,
     10
    ],
    [
     88,
     9
    ],
    [
     100,
     8
    ],
    [
     1000000000,
     7
    ]
   ],
   "simds": 4,
   "most_vgprs": 512
  },
  "gfx950": {
   "target": "gfx950",
   "name": "MI355X",
   "cus": 256,
   "wave_size": 64,
   "waves_per_simd": 8,
   "vgprs": 512,
   "vgpr_unit": 8,
   "agprs": 0,
   "lds": 163840,
   "lds_per_group": 163840,
   "lds_unit": 1280,
   "groups": 16,
   "sgpr_waves": [
    [
     80,
     10
    ],
    [
     88,
     9
    ],
    [
     100,
     8
    ],
    [
     1000000000,
     7
    ]
   ],
   "simds": 4,
   "most_vgprs": 512
  },
  "gfx1100": {
   "target": "gfx1100",
   "name": "RX 7900 XTX",
   "cus": 48,
   "wave_size": 32,
   "waves_per_simd": 16,
   "vgprs": 1536,
   "vgpr_unit": 24,
   "agprs": 0,
   "lds": 131072,
   "lds_per_group": 65536,
   "lds_unit": 1024,
   "groups": 32,
   "sgpr_waves": [],
   "simds": 4,
   "most_vgprs": 256
  },
  "gfx1201": {
   "target": "gfx1201",
   "name": "RX 9070 XT",
   "cus": 32,
   "wave_size": 32,
   "waves_per_simd": 16,
   "vgprs": 1536,
   "vgpr_unit": 24,
   "agprs": 0,
   "lds": 131072,
   "lds_per_group": 65536,
   "lds_unit": 1024,
   "groups": 32,
   "sgpr_waves": [],
   "simds": 4,
   "most_vgprs": 256
  }
 },
 "nvidia": {
  "sm_75": {
   "name": "T4",
   "sms": 40,
   "registers_per_sm": 65536,
   "shared_per_sm": 65536,
   "shared_per_block": 65536,
   "l2_bytes": 0,
   "warp_size": 32,
   "threads_per_sm": 1024,
   "blocks_per_sm": 16,
   "target": "sm_75"
  },
  "sm_80": {
   "name": "A100",
   "sms": 108,
   "registers_per_sm": 65536,
   "shared_per_sm": 167936,
   "shared_per_block": 166912,
   "l2_bytes": 0,
   "warp_size": 32,
   "threads_per_sm": 2048,
   "blocks_per_sm": 32,
   "target": "sm_80"
  },
  "sm_86": {
   "name": "A10",
   "sms": 72,
   "registers_per_sm": 65536,
   "shared_per_sm": 102400,
   "shared_per_block": 101376,
   "l2_bytes": 0,
   "warp_size": 32,
   "threads_per_sm": 1536,
   "blocks_per_sm": 16,
   "target": "sm_86"
  },
  "sm_89": {
   "name": "L4",
   "sms": 58,
   "registers_per_sm": 65536,
   "shared_per_sm": 102400,
   "shared_per_block": 101376,
   "l2_bytes": 0,
   "warp_size": 32,
   "threads_per_sm": 1536,
   "blocks_per_sm": 24,
   "target": "sm_89"
  },
  "sm_90": {
   "name": "H200",
   "sms": 132,
   "registers_per_sm": 65536,
   "shared_per_sm": 233472,
   "shared_per_block": 232448,
   "l2_bytes": 0,
   "warp_size": 32,
   "threads_per_sm": 2048,
   "blocks_per_sm": 32,
   "target": "sm_90"
  },
  "sm_100": {
   "name": "B200",
   "sms": 148,
   "registers_per_sm": 65536,
   "shared_per_sm": 233472,
   "shared_per_block": 232448,
   "l2_bytes": 0,
   "warp_size": 32,
   "threads_per_sm": 2048,
   "blocks_per_sm": 32,
   "target": "sm_100"
  },
  "sm_120": {
   "name": "RTX 5090",
   "sms": 170,
   "registers_per_sm": 65536,
   "shared_per_sm": 102400,
   "shared_per_block": 101376,
   "l2_bytes": 0,
   "warp_size": 32,
   "threads_per_sm": 1536,
   "blocks_per_sm": 24,
   "target": "sm_120"
  }
 },
 "rules": {
  "partitions": 4,
  "registerUnit": 256,
  "registersPerBlock": 65536,
  "registersPerThread": 255,
  "sharedUnits": {
   "sm_75": 256,
   "sm_80": 128,
   "sm_86": 128,
   "sm_89": 128,
   "sm_90": 128,
   "sm_100": 128,
   "sm_120": 128
  },
  "threadsPerBlock": 1024,
  "threadsPerGroup": 1024
 }
};

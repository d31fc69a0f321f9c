"""Three meters of memory traffic: `count`, `formula` (solved from counts), hardware `counters`."""

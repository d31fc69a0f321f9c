"""Three meters of one quantity: `count` (element by element), `formula` (solved from counts), `counters` (hardware)."""

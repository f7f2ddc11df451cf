"""Numbers: grids, scale search, packing arithmetic. Knows no tensor name and no path."""

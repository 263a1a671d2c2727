"""Pure analysis: arrays and rows in, arrays and rows out; drawing and printing are in `report`."""

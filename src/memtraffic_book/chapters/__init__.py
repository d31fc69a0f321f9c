"""What the folded cells of a chapter do, a module for each chapter and a function for each cell."""

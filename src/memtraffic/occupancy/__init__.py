"""How many programs of a kernel one processor of a GPU holds at once, by the rules of its maker."""

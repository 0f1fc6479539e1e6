"""Scripts and command lines that people already have, read into recipes. Nothing in them is ever executed."""

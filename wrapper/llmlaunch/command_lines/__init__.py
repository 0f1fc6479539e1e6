"""Scripts, command lines and logs that people already have, read into recipes and measurements. Nothing in them is ever
executed."""

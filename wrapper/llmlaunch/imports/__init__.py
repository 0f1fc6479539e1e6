"""Scripts and logs that people already have, read into recipes and measurements by the framework they belong to."""

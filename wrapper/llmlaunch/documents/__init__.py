"""Files that people write: read strictly, every value knowing the line it stands on."""

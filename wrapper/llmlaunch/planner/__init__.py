"""From a recipe to a plan (docs/architecture.md, "From a recipe to a plan")."""

"""Model families of Hugging Face: a file for each in `model_types/`, and what is derived from all of them."""

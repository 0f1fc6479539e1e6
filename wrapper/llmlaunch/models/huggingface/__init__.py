"""Model shapes from Hugging Face's `config.json`, and back."""

"""DeepSpeed as a backend: `backend.DeepSpeed` is what others take from this room."""

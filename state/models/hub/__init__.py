"""Models in memory to and from Hugging Face's formats, each weight placed by itself."""

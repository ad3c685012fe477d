"""An OpenAI-compatible server over two processes; see main.py."""

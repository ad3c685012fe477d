"""A continuous-batching scheduler over two processes; see main.py."""

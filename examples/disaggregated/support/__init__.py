"""The rest of the demo: a model and its weights, the frame of the processes, the router, and the output."""

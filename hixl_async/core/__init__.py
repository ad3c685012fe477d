"""The Cython modules behind ``hixl_async._core``: drivers and links, memory, batches, transfers, and operations in flight."""

__all__: list[str] = []

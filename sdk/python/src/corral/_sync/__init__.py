"""The blocking client, made from the asyncio one by ``tools/unasync.py``."""

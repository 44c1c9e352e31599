"""TriKV: an external KV cache for vLLM.

One daemon a host (`trikv.nursery`) owns the pool and the index; engines attach through
`trikv.connector`; `trikv.core` holds every decision and does no I/O. The wire between them is
`schema/kv.capnp`. This file holds the version and imports nothing.
"""

__version__ = "0.1.0"

"""TriKV inside vLLM's processes.

`kv_connector_module_path: trikv.connector` finds `TriKVConnector` here; everything else imports
without vLLM.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trikv.connector.connector import TriKVConnector

__all__ = ["TriKVConnector"]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """Import the class that subclasses vLLM's only when it is asked for."""
    if name == "TriKVConnector":
        from trikv.connector.connector import TriKVConnector  # noqa: PLC0415

        return TriKVConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""The `vllm.general_plugins` entry point: `kv_connector: TriKVConnector` is found by name alone."""

NAME = "TriKVConnector"


def register() -> None:
    """Enter the connector in vLLM's registry; again: no effect."""
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415
        KVConnectorFactory,
    )

    if NAME not in KVConnectorFactory._registry:  # noqa: SLF001  # there is no public way to ask
        KVConnectorFactory.register_connector(NAME, "trikv.connector", NAME)

"""Open remote read in one worker, once the data path that it reads from and writes to is put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstrata.config import ConnectorConfig
from kvstrata.core.bundle import Bundle
from kvstrata.core.layers import Component
from kvstrata.core.shares import control_port
from kvstrata.errors import LayoutError
from kvstrata.memory.pages import PageView
from kvstrata.memory.region import HostRegion
from kvstrata.remote.consumer.endpoint import ConsumerEndpoint
from kvstrata.remote.metaserver import MetaserverClient
from kvstrata.remote.options import EndpointOptions
from kvstrata.remote.producer.endpoint import ProducerEndpoint
from kvstrata.remote.protocol.handshake import component_layouts
from kvstrata.remote.protocol.messages import Place
from kvstrata.remote.protocol.secret import load_secret
from kvstrata.remote.transports.registry import transports_for

from .data_path import DataPath
from .namespace import model_identity
from .remote_pulls import Here
from .remote_receiver import Receiver
from .remote_roles import roles_of
from .remote_scheduler import RemoteScheduler
from .remote_sender import Sender
from .remote_worker import RemoteWorker
from .settings import Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_OPEN_WAIT_S = 60.0


def open_remote_scheduler(vllm_config: VllmConfig, settings: Settings) -> RemoteScheduler | None:
    """Return the scheduler's half; None where remote read is off."""
    roles = roles_of(vllm_config, settings)
    if not roles:
        return None
    assert settings.connector is not None
    transfer, parallel = settings.connector.transfer, vllm_config.parallel_config
    assert transfer.kv_port is not None
    secret = load_secret(transfer.remote_secret, host=transfer.remote_host)
    deadline_s = min(settings.connector.deadline_s, transfer.remote_wait_s)
    return RemoteScheduler(
        sends="producer" in roles,
        block_tokens=vllm_config.cache_config.block_size,
        here=Here(
            host=transfer.remote_host,
            kv_port=transfer.kv_port,
            tp_size=parallel.tensor_parallel_size,
            dp_rank=parallel.data_parallel_index,
        ),
        metaserver=MetaserverClient(secret, deadline_s=deadline_s) if "consumer" in roles else None,
    )


def open_remote_worker(
    path: DataPath,
    bundles: Sequence[Bundle],
    *,
    vllm_config: VllmConfig,
    settings: Settings,
    tp_rank: int,
    regions: Sequence[HostRegion],
) -> RemoteWorker | None:
    """Return the worker's half; None where remote read is off.

    ``regions`` are the shared memory that the homes of the layers lie in, for other engines to read.
    """
    roles = roles_of(vllm_config, settings)
    if not roles:
        return None
    assert settings.connector is not None
    transfer, parallel = settings.connector.transfer, vllm_config.parallel_config
    assert transfer.kv_port is not None
    options = endpoint_options(settings.connector, model=model_identity(vllm_config))
    components = component_layouts(bundles)
    transports = transports_for(
        transfer.transfer_backend, memfabric_protocol=transfer.memfabric_transfer_protocol
    )
    tp_size = parallel.tensor_parallel_size
    homes = {
        (layout.layer, Component(layout.component)): path.home(layout.layer, Component(layout.component))
        for layout in components
    }
    sender = receiver = None
    if "producer" in roles:
        drafts = [bundle.index for bundle in bundles if bundle.is_draft]
        sender = Sender(
            ProducerEndpoint(
                options=options,
                rank=tp_rank,
                tp_size=tp_size,
                components=components,
                places=[place_in(regions, view) for view in homes.values()],
                regions=regions,
                transports=transports,
            ),
            rank=tp_rank,
            tp_size=tp_size,
            targets=[bundle.index for bundle in bundles if not bundle.is_draft],
            drafts=drafts,
            saved=path.saved,
        )
    if "consumer" in roles:
        shares_main = path.shares_main_home
        receiver = Receiver(
            ConsumerEndpoint(
                options=options,
                port=control_port(transfer.kv_port, parallel.data_parallel_index, tp_size, tp_rank),
                tp_rank=tp_rank,
                tp_size=tp_size,
                main_rank=tp_rank if shares_main else 0,
                main_ranks=tp_size if shares_main else 1,
                components=components,
                destinations=homes,
                transports=transports,
            )
        )
    return RemoteWorker(sender=sender, receiver=receiver, deadline_s=settings.connector.deadline_s)


def endpoint_options(connector: ConnectorConfig, *, model: str = "") -> EndpointOptions:
    """Return what the knobs make of an endpoint, on either side. May make the user's secret file."""
    transfer = connector.transfer
    return EndpointOptions(
        host=transfer.remote_host,
        secret=load_secret(transfer.remote_secret, host=transfer.remote_host),
        lease_s=transfer.remote_lease_s,
        resend_s=min(0.5, transfer.remote_lease_s / 4),
        # Decode stops waiting for prefill then: a prefill that goes on offering holds blocks for nobody.
        open_wait_s=min(_OPEN_WAIT_S, transfer.remote_wait_s),
        wait_s=transfer.remote_wait_s,
        read_deadline_s=min(connector.deadline_s, 30.0),
        read_attempts=transfer.remote_read_attempts,
        memfabric_protocol=transfer.memfabric_transfer_protocol,
        model=model,
    )


def place_in(regions: Sequence[HostRegion], view: PageView) -> Place:
    """Return where a view's pages lie in the regions; LayoutError if they lie outside all of them."""
    for index, region in enumerate(regions):
        offset = view.address - region.address
        if offset >= 0 and offset + view.span_bytes <= region.size_bytes:
            return Place(
                region=index,
                offset=offset,
                block_stride_bytes=view.block_stride_bytes,
                num_blocks=view.num_blocks,
            )
    raise LayoutError(
        f"pages at {view.address:#x} lie in none of {len(regions)} shared regions: other engines cannot read "
        "them"
    )

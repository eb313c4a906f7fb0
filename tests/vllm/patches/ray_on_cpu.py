"""Ray executors on a CPU, which vLLM's CPU platform has no resource for: a made-up one takes its place.

Ray itself is a private one, started here and ended with the engine; ``ECOTONE_TEST_RAY`` is its folder.
"""

from __future__ import annotations

import os
from typing import Any

RESOURCE = "test_cpu"


def _name_resource(module: Any) -> None:
    module.CpuPlatform.ray_device_key = RESOURCE
    module.CpuPlatform.ray_noset_device_env_vars = []


def _start_ray(module: Any) -> None:
    ray, connect = module.ray, module.initialize_ray_cluster

    def initialize_ray_cluster(*args: Any, **kwargs: Any) -> Any:
        if not ray.is_initialized():
            ray.init(
                address="local",
                num_cpus=2,
                resources={RESOURCE: 4},
                include_dashboard=False,
                object_store_memory=100 << 20,
                _temp_dir=os.environ["ECOTONE_TEST_RAY"],
                _node_ip_address="127.0.0.1",
            )
        return connect(*args, **kwargs)

    module.initialize_ray_cluster = initialize_ray_cluster
    _number_devices(module.RayWorkerWrapper, ray, lambda _: 0)


def _number_workers(module: Any) -> None:
    _number_devices(module.RayWorkerProc, module.ray, lambda worker: worker._init_kwargs["rank"])


def _number_devices(worker: Any, ray: Any, number: Any) -> None:
    def get_node_and_physical_gpu_ids(self: Any) -> tuple[str, list[int]]:
        return ray.get_runtime_context().get_node_id(), [number(self)]

    worker.get_node_and_physical_gpu_ids = get_node_and_physical_gpu_ids


AFTER_IMPORT = {
    "vllm.platforms.cpu": _name_resource,
    "vllm.v1.executor.ray_utils": _start_ray,
    "vllm.v1.executor.ray_executor_v2": _number_workers,
}

from __future__ import annotations

import torch.distributed as dist


class TorchDistBackend:
    def Get_rank(self) -> int:  # noqa: N802  (FlashInfer's name)
        return dist.get_rank()

    def Get_size(self) -> int:  # noqa: N802
        return dist.get_world_size()

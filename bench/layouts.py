"""Print the arithmetic of docs/scale.md: python bench/layouts.py

Bytes and seconds of one optimizer step on several layouts of GPUs, from the shapes of the models and stated rates of
the hardware. Nothing is measured: the rates are below, change them for other hardware. tests/unit/docs/test_scale.py
compares the output with the page.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from treadle.budget.hardware import REDUCE_BYTES
from treadle.budget.shapes import KNOWN, ModelShape
from treadle.wire.groups import ScoredGroup, pack_group

# ---- stated rates, per second

TRAIN_FLOPS = 400e12  # of a GPU in training: 40 % of what an H100 does in bf16
HBM_BYTES = 3.35e12  # memory of an H100
NVLINK_BYTES = 450e9  # of each GPU, in one direction
PORT_BYTES = 50e9  # InfiniBand, 400 Gb/s
PCIE_BYTES = 55e9  # between a GPU and host memory, in one direction
HOST_BYTES = 200e9  # host memory of a machine
FILE_WRITER_BYTES = 5e9  # shared file system: one process that writes
FILE_READERS_BYTES = 40e9  # all that read together
OBJECT_BYTES = 1e9  # object store: one client

# ---- the work of a step

GROUPS, GROUP_SIZE = 64, 8
PROMPT_TOKENS, COMPLETION_TOKENS = 512, 1536  # in the mean
MAX_NUM_SEQS = 128  # of each engine
WEIGHT_BYTES = 2


@dataclass(frozen=True)
class Layout:
    name: str
    shape: ModelShape
    engines: int
    tensor_parallel: int
    ranks: int
    rank_nodes: int
    micro_tokens: int
    is_on_host: bool  # --train.optimizer adamw_cpu
    offloads_weights: bool
    by_files: bool  # reload, else a broadcast
    ports: int = 8  # InfiniBand ports of a machine

    @property
    def weights(self) -> float:
        return WEIGHT_BYTES * self.shape.num_params

    @property
    def num_micros(self) -> int:
        """Of each rank."""
        return math.ceil(trained_tokens() / self.ranks / self.micro_tokens)

    @property
    def generation_s(self) -> float:
        """The least: every step of decoding reads the weights and the KV cache of the running sequences."""
        sequences = GROUPS * GROUP_SIZE / self.engines
        running = min(MAX_NUM_SEQS, sequences)
        cache = running * (PROMPT_TOKENS + COMPLETION_TOKENS / 2) * kv_bytes(self.shape)
        step_s = (self.weights + cache) / self.tensor_parallel / HBM_BYTES
        return sequences / running * COMPLETION_TOKENS * step_s

    @property
    def compute_s(self) -> float:
        """Forward 2, backward 4 and the forward pass of checkpointing 2, for each parameter and token."""
        return 8 * self.shape.num_params * trained_tokens() / self.ranks / TRAIN_FLOPS

    @property
    def gathered(self) -> float:
        """Bytes that a rank receives in a step: each micro gathers all weights twice."""
        return self.num_micros * 2 * self.weights * (1 - 1 / self.ranks)

    @property
    def reduced(self) -> float:
        """Bytes that a rank sends: gradients of each micro, summed over the ranks in fp32."""
        return self.num_micros * REDUCE_BYTES * self.shape.num_params * (1 - 1 / self.ranks)

    @property
    def link(self) -> float:
        """Between the ranks. Across machines, a ring of all ranks passes once through each machine for every port."""
        return NVLINK_BYTES if self.rank_nodes == 1 else min(NVLINK_BYTES, self.ports * PORT_BYTES)

    @property
    def exchange_s(self) -> float:
        return (self.gathered + self.reduced) / self.link

    @property
    def host_link_bytes(self) -> float:
        """Of each rank and step, to and from host memory: gradients, and offloaded weights twice."""
        share = self.weights / self.ranks
        return self.num_micros * share * ((1 if self.is_on_host else 0) + (2 if self.offloads_weights else 0))

    @property
    def host_memory_bytes(self) -> float:
        """Read and written in a step with adamw_cpu: accumulators in each micro, then the optimizer's state."""
        params = self.shape.num_params
        return (self.num_micros * 10 + 30) * params if self.is_on_host else 0.0

    @property
    def training_s(self) -> float:
        """If the exchange between ranks hides behind the computation, and host memory does not."""
        host_s = self.host_link_bytes / PCIE_BYTES + self.host_memory_bytes / HOST_BYTES
        return max(self.compute_s, self.exchange_s) + host_s

    @property
    def whole_weights_s(self) -> float:
        """All ranks gather the weights one at a time: to publish them, and for their fingerprints."""
        return 2 * self.weights * (1 - 1 / self.ranks) / self.link

    @property
    def transfer_s(self) -> float:
        if self.by_files:
            return self.weights / FILE_WRITER_BYTES + self.engines * self.weights / FILE_READERS_BYTES
        return self.weights / (NVLINK_BYTES if self.rank_nodes == 1 else PORT_BYTES)  # rank 0 sends on one port

    @property
    def publish_s(self) -> float:
        return self.whole_weights_s + self.transfer_s

    @property
    def step_s(self) -> float:
        """With max_age 1: the engines sample the next batch while the trainer computes."""
        return max(self.generation_s, self.training_s) + self.publish_s


def trained_tokens() -> int:
    """The trainer packs a prompt once for its group."""
    return GROUPS * (PROMPT_TOKENS + GROUP_SIZE * COMPLETION_TOKENS)


def kv_bytes(shape: ModelShape) -> int:
    return 2 * shape.num_layers * shape.kv_width * WEIGHT_BYTES


def rollout_bytes() -> int:
    """Of a batch in binary form, as environments post it and the trainer leases it."""
    length = PROMPT_TOKENS + COMPLETION_TOKENS
    rows = [[1] * length] * GROUP_SIZE
    group = ScoredGroup(
        tokens=rows, masks=rows, scores=[0.0] * GROUP_SIZE, inference_logprobs=[[0.0] * length] * GROUP_SIZE
    )
    return GROUPS * len(pack_group(group))


QWEN_14B, QWEN_72B = KNOWN["qwen3-14b"], KNOWN["qwen2.5-72b"]
LAYOUTS = (
    Layout("a: 14B, 2 + 1", QWEN_14B, 1, 2, 1, 1, 32_768, True, False, False),
    Layout("b: 72B, 4 + 2", QWEN_72B, 1, 4, 2, 1, 16_384, True, True, False),
    Layout("c: 72B, 8 x 4 + 32", QWEN_72B, 8, 4, 32, 4, 8192, False, False, True),
    Layout("d: 72B, 8 + 56", QWEN_72B, 1, 8, 56, 7, 8192, False, False, False),
)


def size(num_bytes: float) -> str:
    """Three digits.

    >>> [size(0), size(12.64e6), size(145.4e9), size(5.09e12)]
    ['-', '12.6 MB', '145 GB', '5.09 TB']
    """
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if num_bytes >= unit:
            value = num_bytes / unit
            return f"{value:.{max(0, 2 - int(math.log10(value)))}f} {name}"
    return "-"


def seconds(value: float) -> str:
    return (
        "-" if value == 0 else f"{value:.2f} s" if value < 1 else f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
    )


def rows() -> list[tuple[str, ...]]:
    """(what, value of each layout)."""
    table = {
        "engines x tensor parallel + ranks": lambda one: f"{one.engines} x {one.tensor_parallel} + {one.ranks}",
        "rollouts, through the hub, each way": lambda _: size(rollout_bytes()),
        "generation, at least": lambda one: seconds(one.generation_s),
        "tokens/s of all engines, at most": lambda one: f"{sampled_tokens() / one.generation_s:,.0f}",
        "micros of each rank": lambda one: str(one.num_micros),
        "computing": lambda one: seconds(one.compute_s),
        "weights gathered, of each rank": lambda one: size(one.gathered),
        "gradients reduced, of each rank": lambda one: size(one.reduced),
        "both, over the link of the ranks": lambda one: seconds(one.exchange_s),
        "to and from host memory, of each rank": lambda one: size(one.host_link_bytes),
        "over PCIe": lambda one: seconds(one.host_link_bytes / PCIE_BYTES),
        "read and written in host memory": lambda one: size(one.host_memory_bytes),
        "at its rate": lambda one: seconds(one.host_memory_bytes / HOST_BYTES),
        "**training**": lambda one: f"**{seconds(one.training_s)}**",
        "weights of a publish": lambda one: size(one.weights),
        "of each engine worker": lambda one: size(one.weights / one.tensor_parallel),
        "whole weights gathered, twice": lambda one: seconds(one.whole_weights_s),
        "sent": lambda one: "files" if one.by_files else "NVLink" if one.rank_nodes == 1 else "InfiniBand",
        "sending": lambda one: seconds(one.transfer_s),
        "**publish**": lambda one: f"**{seconds(one.publish_s)}**",
        "**step, max_age 1**": lambda one: f"**{seconds(one.step_s)}**",
    }
    return [(what, *(show(layout) for layout in LAYOUTS)) for what, show in table.items()]


def sampled_tokens() -> int:
    return GROUPS * GROUP_SIZE * COMPLETION_TOKENS


def transports() -> list[tuple[str, ...]]:
    """Seconds for the weights of each model, sent once at each rate."""
    rates = (
        ("NVLink", NVLINK_BYTES), ("InfiniBand, 8 ports", 8 * PORT_BYTES), ("InfiniBand, 1 port", PORT_BYTES),
        ("shared file system, one writer", FILE_WRITER_BYTES), ("object store, one client", OBJECT_BYTES),
    )  # fmt: skip
    models = (QWEN_14B, KNOWN["qwen3-32b"], QWEN_72B)
    return [
        (name, *(seconds(WEIGHT_BYTES * shape.num_params / rate) for shape in models)) for name, rate in rates
    ]  # fmt: skip


def markdown(header: tuple[str, ...], body: list[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *body]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    print(f"{sampled_tokens():,} tokens sampled, {trained_tokens():,} trained\n")
    print(markdown(("", *(layout.name for layout in LAYOUTS)), rows()))
    header = (
        "weights once",
        *(
            f"{shape.name}, {size(WEIGHT_BYTES * shape.num_params)}"
            for shape in (QWEN_14B, KNOWN["qwen3-32b"], QWEN_72B)
        ),
    )
    print(f"\n{markdown(header, transports())}")


if __name__ == "__main__":
    main()

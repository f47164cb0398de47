"""A Ray cluster of several node processes on this machine: prints its address; each line of input kills a node."""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster

STORE = {"object_store_memory": 80 * 2**20}


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **STORE})
    nodes = {}
    for _ in range(int(sys.argv[1])):
        node = cluster.add_node(num_cpus=1, **STORE)
        nodes[node.node_id] = node
    print(cluster.address, flush=True)
    for line in sys.stdin:
        cluster.remove_node(nodes.pop(line.strip()), allow_graceful=False)
        print("killed", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()

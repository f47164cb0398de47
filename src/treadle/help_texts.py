"""What `treadle VERB --help` says first, of the verbs that have more flags than anybody reads."""

from __future__ import annotations

from types import MappingProxyType

from treadle.config.flags import Guide
from treadle.support import MATRIX_MODES

GUIDES = MappingProxyType({
    "run": Guide(
        usage="[--config FILE] [FLAG VALUE ...]",
        about="Train a model: starts hub, engine, environment and trainer on this machine, watches them, and reports "
        "what was learned. Without any flag a small model learns to add, in some minutes. Flags with a point belong to "
        "one process; a TOML file holds the same settings, and flags win over it.",
        examples={
            "treadle run": "the built-in job",
            "treadle run --model Qwen/Qwen3-0.6B --env gsm8k --steps 200": "another model, another task",
            "treadle run --env ./my_env.py --open": "your own task, and its page in the browser",
            "treadle run --resume runs/20260102-030405-gsm8k": "go on where a run stopped",
        },
        flags={
            "the run": (
                "--model", "--steps", "--seed", "--output", "--config", "--resume", "--plain", "--open", "--fit",
            ),
            "what is learned": (
                "--env", "--env.task", "--env.data", "--env.group-size", "--env.max-token-length",
                "--env.temperature", "--env.num-eval", "--env.steps-per-eval",
            ),
            "how it is learned": (
                "--train.lr", "--train.batch-size", "--train.objective", "--train.kl-coef", "--train.lora",
                "--train.seq-len", "--train.checkpoint-interval", "--train.track",
            ),
            "where it runs": (
                "--engine.engine", "--engine.device", "--engine.gpus", "--train.gpus", "--hub-url", "--engine-url",
                "--on",
            ),
        },
    ),
    "sft": Guide(
        usage="--data ROWS [--model MODEL] [FLAG VALUE ...]",
        about="Train a model on rows (supervised fine-tuning), or on the completions of a run that scored well. They "
        "are packed, and the loss is on the assistant's tokens. The result is a run folder, for treadle run --model.",
        examples={
            "treadle sft --data rows.jsonl": "the built-in model; rows with messages, prompt and completion, or text",
            "treadle sft --data rows.jsonl --model Qwen/Qwen3-0.6B --train.lora": "another model, adapters",
            "treadle sft --from runs/20260102-030405-gsm8k --min-score 1": "the right answers of a run",
            "treadle sft --resume runs/20260102-030405-sft-rows": "go on where it stopped",
        },
        flags={
            "the rows": (
                "--data", "--data-split", "--data-columns", "--system-prompt", "--from", "--min-score", "--held-out",
                "--eval-data",
            ),
            "the run": ("--model", "--epochs", "--steps", "--seed", "--output", "--config", "--resume"),
            "how it is learned": (
                "--train.lr", "--train.batch-size", "--train.lora", "--train.seq-len", "--train.optimizer",
                "--steps-per-eval", "--train.track",
            ),
            "where it runs": ("--train.device", "--train.gpus", "--train.micro-tokens"),
        },
    ),
    "matrix": Guide(
        usage="[--modes NAMES] [FLAG VALUE ...]",
        about="Run the weight modes (how new weights reach the engine) one after another, on the same task and seed, "
        "each as an ordinary treadle run; write one table and one plot: seconds per step and publish, bytes sent, "
        f"memory, tokens per second, parity of trainer and engine, reward. Modes: {', '.join(MATRIX_MODES)}; "
        "shared_vllm stands for the first two. The exit code is 1 when a mode failed. Takes the flags of treadle run "
        "too.",
        examples={
            "treadle matrix --steps 5": "all modes that can run here",
            "treadle matrix --modes lora_only --steps 3": "does one mode work here?",
            "treadle matrix --engine vllm --model Qwen/Qwen3-0.6B": "with vLLM",
            "treadle matrix --resume runs/20260102-030405-matrix-gsm8k": "continue an interrupted matrix",
        },
        flags={
            "the matrix": ("--modes", "--resume", "--steps", "--seed", "--output", "--config", "--plain"),
            "what is learned": ("--model", "--env.name", "--env.task", "--env.group-size", "--env.max-token-length"),
            "how it is learned": ("--train.lr", "--train.batch-size", "--train.vllm-restart-interval"),
            "where it runs": ("--engine", "--engine.device", "--engine.vllm-python", "--hub.port"),
        },
    ),
    "plan": Guide(
        usage="[--cards [Nx]NAME] [FLAG VALUE ...]",
        about="Say how much memory a run would take, whether it fits, and what would make it fit; nothing is loaded. "
        "Takes the flags of treadle run too.",
        examples={
            "treadle plan": "the built-in job on this machine",
            "treadle plan --model Qwen/Qwen3-8B --gpu h100": "another model on another card",
            "treadle plan --model Qwen/Qwen3-14B --cards 8xh100": "which GPUs the engine gets, and which the trainer",
        },
        flags={
            "the machine": ("--gpu", "--gpu-memory-gb", "--host-memory-gb", "--train-gpus", "--engine-gpus"),
            "the run": (
                "--model", "--params", "--mode", "--train.batch-size", "--train.seq-len", "--train.optimizer",
                "--train.lora", "--env.group-size", "--env.max-token-length", "--config", "--json",
            ),
        },
    ),
    "hub": Guide(
        usage="[--port N] [--database FILE | --store URL] [FLAG VALUE ...]",
        about="Serve the rollout API on a durable queue, and the page of the run. Environments post groups to it, the "
        "trainer fetches batches.",
        examples={
            "treadle hub": "on 127.0.0.1:8000",
            "treadle hub --database RUN/hub.sqlite --run-folder RUN": "the page of a run that is over",
            "treadle hub --store postgresql://treadle@db/run": "the queue in PostgreSQL, for several hubs",
            "treadle hub --host 0.0.0.0 --token-file hub.token": "for other machines",
        },
        flags={
            "where": ("--host", "--port", "--database", "--store", "--run-folder", "--fresh", "--config"),
            "who may call": ("--token-file", "--admin-token-file", "--allowed-hosts"),
            "batches": ("--lease-s", "--max-age", "--stale", "--queue-limit-groups"),
        },
    ),
    "engine": Guide(
        usage="[--model MODEL] [--port N] [FLAG VALUE ...]",
        about="Serve a model: completions with token ids and logprobs, and weights that change while it serves. With "
        "vLLM every flag of its own is taken too.",
        examples={
            "treadle engine": "the built-in model on 127.0.0.1:9001",
            "treadle engine --model Qwen/Qwen3-0.6B --engine vllm": "another one, by vLLM",
            "treadle engine --weights-file /dev/shm/mine.weights": "one copy of the weights with the trainer",
        },
        flags={
            "what": ("--model", "--engine", "--device", "--dtype", "--enable-lora", "--config"),
            "where": ("--host", "--port", "--token-file", "--hub-url", "--weights-file"),
            "how much at once": ("--max-num-seqs", "--max-model-len", "--threads"),
            "vLLM": ("--vllm-python", "--gpu-memory-utilization", "--tensor-parallel-size", "--vllm-args"),
        },
    ),
    "router": Guide(
        usage="[--hub-url URL] [--port N] [FLAG VALUE ...]",
        about="Serve one address for the engines in a hub's table whose weights are verified (smg, extra fleet): "
        "requests go to an engine by load and prefix. treadle run --router smg starts it.",
        examples={
            "treadle router": "the engines of the hub at 127.0.0.1:8000, on 127.0.0.1:9000",
            "treadle router --hub-url http://127.0.0.1:8010 --port 9010": "those of another hub",
            "treadle router --host 0.0.0.0": "for other machines, with the engines' token in TREADLE_ENGINE_TOKEN",
        },
        flags={"where": ("--hub-url", "--host", "--port", "--config")},
    ),
    "env": Guide(
        usage="NAME [serve|process|evaluate|validate] [FLAG VALUE ...]",
        about="Run an environment: a built-in one by its name (arithmetic, gsm8k, ...), verifiers:NAME, or the path of "
        "a .py file. serve (the default) delivers groups to the hub, process writes some to a file, evaluate measures "
        "a model on the held-out prompts, validate checks the task without any model.",
        examples={
            "treadle env ./my_env.py validate": "is this task fit to be trained on?",
            "treadle env gsm8k evaluate --env.data FOLDER": "how good is the model that the engine serves?",
            "treadle env arithmetic serve": "deliver groups to the hub at 127.0.0.1:8000",
        },
        flags={
            "the task": (
                "--env.task", "--env.data", "--env.eval-data", "--env.difficulty", "--env.system-prompt", "--env.args",
                "--config",
            ),
            "rollouts": ("--env.group-size", "--env.max-token-length", "--env.temperature", "--env.seed"),
            "evaluations": ("--env.num-eval", "--env.steps-per-eval", "--env.eval-samples"),
            "who is called": (
                "--env.hub-url", "--openai.base-url", "--openai.server-type", "--openai.api-key",
            ),
        },
    ),
    "train": Guide(
        usage="[--model MODEL] [FLAG VALUE ...]",
        about="Run the trainer: leases batches from the hub, takes optimizer steps, and publishes the weights to the "
        "engine. The same command again goes on from the newest checkpoint.",
        examples={
            "treadle train --save-path mine": "25 steps of the built-in model",
            "treadle train --model Qwen/Qwen3-0.6B --steps 200 --lr 1e-6": "another model",
            "treadle train --lora --objective dapo --kl-coef 0.01": "adapters, and another objective",
        },
        flags={
            "the run": ("--model", "--steps", "--seed", "--save-path", "--checkpoint-interval", "--config"),
            "batches": ("--batch-size", "--gradient-accumulation-steps", "--seq-len", "--max-age"),
            "learning": ("--lr", "--optimizer", "--schedule", "--objective", "--clip-eps", "--kl-coef", "--lora"),
            "who is called": ("--hub-url", "--engine-url"),
            "memory and speed": ("--device", "--dtype", "--micro-tokens", "--gradient-checkpointing"),
            "figures": ("--metrics-file", "--track"),
        },
    ),
    "doctor": Guide(
        usage="[RUN] [--hub URL] [--engine URL] [FLAG VALUE ...]",
        about="Check this machine for a run with the given flags (all those of treadle run); or, with a run's folder "
        "or addresses, the live system; and say what is wrong and how to fix it. Ends with 1 when something is wrong.",
        examples={
            "treadle doctor": "this machine",
            "treadle doctor --model Qwen/Qwen3-8B --engine.engine vllm": "is it fit for that run?",
            "treadle doctor runs/20260102-030405-gsm8k": "the processes and logs of a run",
            "treadle doctor --hub http://127.0.0.1:8000": "a hub that serves now",
        },
        flags={
            "what to look at": ("--hub", "--engine", "--model", "--engine.engine", "--engine.vllm-python", "--output"),
            "how": ("--verbose", "--json", "--config"),
        },
    ),
})  # fmt: skip

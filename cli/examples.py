"""Examples that every command's help ends with, on the files of ``sample_data`` and the run that the first one makes.

A line is at most 78 characters, so that it is whole on a terminal of 80 columns.
"""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "collect": (
        """\
gymdata collect sample_data/tasks/train.jsonl -m sample_data/policy \\
    -n 100 -r 8 --env sample_data/calculator.py:Calculator \\
    --reward numeric --max-tokens 48 --seed 1 -o runs/x""",
        """\
gymdata collect sample_data/tasks/train.jsonl -m MODEL \\
    --endpoint http://localhost:8000 --tokenizer sample_data/policy -r 4""",
    ),
    "record": ("gymdata record -m sample_data/policy -o runs/agent -- python agent.py",),
    "serve": ("gymdata serve -m sample_data/policy --port 8000",),
    "check": (
        "gymdata check sample_data/rollouts/clean.jsonl",
        "gymdata check sample_data/policy",
        "gymdata check --endpoint http://localhost:8000",
        "gymdata check --env sample_data/calculator.py:Calculator",
    ),
    "validate": ("gymdata validate runs/x", "gymdata validate --explain T209"),
    "audit": ("gymdata audit runs/x -m sample_data/policy -n 100",),
    "score": ("gymdata score runs/x --reward numeric",),
    "judge": ("gymdata judge runs/x --genrm sample_data/genrm --show transcript -n 20",),
    "serve-genrm": ("gymdata serve-genrm --genrm sample_data/genrm --port 8000",),
    "eval": (
        """\
gymdata eval sample_data/policy sample_data/tasks/heldout.jsonl -o runs/eval \\
    --env sample_data/calculator.py:Calculator --reward numeric""",
    ),
    "filter": (
        'gymdata filter runs/x --where "reward > 0.5" -o runs/good',
        "gymdata filter runs/x sample_data/rollouts/nemo_gym.jsonl -o runs/both",
    ),
    "pairs": ("gymdata pairs runs/x",),
    "experience": ("gymdata experience runs/x", "gymdata experience runs/x --estimator gae --lambda 0.95"),
    "train-sft": ("gymdata train-sft runs/x -m sample_data/policy -o runs/lora --lora --merge",),
    "train-dpo": (
        """\
gymdata train-dpo runs/x -m sample_data/policy -o runs/dpo \\
    --config sample_data/dpo.yaml --set learning_rate=1e-4""",
    ),
    "train-kto": ("gymdata train-kto runs/x -m sample_data/policy -o runs/kto",),
    "train-reward": ("gymdata train-reward runs/x -m sample_data/policy -o runs/reward-model",),
    "train-value": ("gymdata train-value runs/x/experiences-gae -m sample_data/policy -o runs/value",),
    "train-rl": ("gymdata train-rl runs/x/experiences-grpo -m sample_data/policy -o runs/rl",),
    "finetune": ("gymdata finetune sample_data/finetune.yaml -o num_epochs 2",),
    "sweep": ("gymdata sweep sample_data/sweep.yaml -o runs/sweep",),
    "show": ("gymdata show runs/x --best -n 3", "gymdata show runs/x --pair first"),
    "view": ("gymdata view runs/x", "gymdata view runs/x --export runs/x.html"),
    "report": ("gymdata report runs/x",),
    "query": ('gymdata query "SELECT * FROM turns LIMIT 5" runs/x -o runs/turns.csv',),
    "ls": ("gymdata ls runs",),
    "import": ("gymdata import sample_data/rollouts/nemo_gym.jsonl -o runs/gym",),
    "export": ("gymdata export runs/x --format trl-messages -o runs/messages.jsonl",),
    "docs": ("gymdata docs your-data",),
    "tour": ("gymdata tour",),
    "demo": ("gymdata demo -o runs/demo", "gymdata demo --real"),
    "doctor": ("gymdata doctor",),
}

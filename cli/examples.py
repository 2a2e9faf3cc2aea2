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
gymdata collect sample_data/tasks/tutor.jsonl -m sample_data/student \\
    -r 8 --env sample_data/calculator.py:Calculator --max-tokens 48 \\
    --user sample_data/tutor.py:tutor --seed 1 -o runs/tutor""",
        """\
gymdata collect sample_data/tasks/train.jsonl -m MODEL \\
    --endpoint http://localhost:8000 --tokenizer sample_data/policy -r 4""",
    ),
    "record": (
        "gymdata record -m sample_data/policy -o runs/agent -- python agent.py",
        "gymdata record -m MODEL -o runs/agent --port 8100 --reward numeric",
        "gymdata record --endpoint http://localhost:8000 -m MODEL -o runs/agent",
    ),
    "serve": (
        "gymdata serve -m sample_data/policy --port 8000",
        "gymdata serve -m MODEL --set engine.max_model_len=8192 --dry-run",
    ),
    "check": (
        "gymdata check sample_data/policy",
        "gymdata check --endpoint http://localhost:8000",
        """\
gymdata check --env sample_data/calculator.py:Calculator \\
    --tasks sample_data/tasks/train.jsonl""",
    ),
    "validate": (
        "gymdata validate runs/x",
        "gymdata validate runs/x --strict --select T2 --json",
        "gymdata validate --explain T209",
    ),
    "audit": (
        "gymdata audit runs/x -m sample_data/policy -n 100",
        "gymdata audit runs/x -m REFERENCE --write-as ref_logprobs",
    ),
    "score": (
        "gymdata score runs/x --reward numeric",
        "gymdata score runs/x --reward numeric -n 20 -o runs/tried",
    ),
    "judge": ("gymdata judge runs/x --genrm sample_data/genrm --show transcript -n 20",),
    "serve-genrm": ("gymdata serve-genrm --genrm sample_data/genrm --port 8000",),
    "eval": (
        """\
gymdata eval sample_data/policy sample_data/tasks/heldout.jsonl -o runs/eval \\
    --env sample_data/calculator.py:Calculator --reward numeric""",
        """\
gymdata eval sample_data/policy sample_data/tasks/train.jsonl -n 50 -r 8 \\
    --temperature 1 --reward numeric --against runs/x""",
    ),
    "filter": (
        'gymdata filter runs/x --where "reward > 0.5" -o runs/good',
        """\
gymdata filter runs/x --group-where "min_reward < max_reward" --best-n 2 \\
    --dedupe -o runs/mixed""",
        "gymdata filter runs/x sample_data/rollouts/nemo_gym.jsonl -o runs/both",
    ),
    "pairs": ("gymdata pairs runs/x", "gymdata pairs runs/x --strategy all --max-pairs-per-task 4 -o runs/pairs"),
    "experience": (
        "gymdata experience runs/x",
        "gymdata experience runs/x --estimator rloo -o runs/rloo",
        "gymdata experience runs/x --estimator gae --lambda 0.95",
    ),
    "train-sft": (
        """\
gymdata train-sft runs/x -m sample_data/policy -o runs/sft \\
    --config sample_data/sft.yaml""",
        "gymdata train-sft runs/x -m sample_data/policy -o runs/lora --lora --merge",
    ),
    "train-dpo": (
        """\
gymdata train-dpo runs/x -m sample_data/policy -o runs/dpo \\
    --config sample_data/dpo.yaml --set learning_rate=1e-4""",
    ),
    "train-kto": (
        """\
gymdata train-kto runs/x -m sample_data/policy -o runs/kto \\
    --config sample_data/kto.yaml""",
    ),
    "train-reward": (
        """\
gymdata train-reward runs/x -m sample_data/policy \\
    -o runs/reward-model --config sample_data/reward.yaml""",
    ),
    "train-value": (
        """\
gymdata train-value runs/x/experiences-gae -m sample_data/policy \\
    -o runs/critic --config sample_data/value.yaml""",
    ),
    "train-rl": (
        """\
gymdata train-rl runs/x/experiences-grpo -m sample_data/policy \\
    -o runs/rl --config sample_data/rl.yaml""",
    ),
    "finetune": (
        "gymdata finetune sample_data/finetune.yaml",
        "gymdata finetune sample_data/finetune.yaml -o num_epochs 2",
    ),
    "sweep": ("gymdata sweep sample_data/sweep.yaml --dry-run", "gymdata sweep sample_data/sweep.yaml -o runs/sweep"),
    "show": ("gymdata show runs/x", "gymdata show runs/x --best -n 3", "gymdata show runs/x --pair first"),
    "view": ("gymdata view runs/x", "gymdata view runs/x --export runs/x.html"),
    "report": ("gymdata report runs/x",),
    "query": (
        """\
gymdata query "SELECT task_id, avg(reward) FROM rollouts GROUP BY 1" runs/x""",
        'gymdata query "SELECT * FROM turns LIMIT 5" runs/x -o runs/turns.csv',
    ),
    "ls": ("gymdata ls runs", "gymdata ls runs/x --json"),
    "import": ("gymdata import sample_data/rollouts/nemo_gym.jsonl -o runs/gym",),
    "export": (
        "gymdata export runs/x --format trl-messages -o runs/messages.jsonl",
        "gymdata export runs/x --format atif -o runs/atif.jsonl",
    ),
    "docs": ("gymdata docs", "gymdata docs your-data"),
    "tour": ("gymdata tour", "gymdata tour -o runs/look --no-view"),
    "demo": ("gymdata demo -o runs/demo", "gymdata demo --real"),
    "doctor": ("gymdata doctor", "gymdata doctor . --json"),
}

"""What stages need from the outside world, as Protocols. Adapters implement them; tests may stand in for them.

What always holds: a Sampler gets token ids and gives token ids, so nothing between engine and disk ever re-tokenises; an
outside fault is raised as ``OutsideError`` naming its system, and never comes back as a value.
"""

from __future__ import annotations

from gymdata.ports.judging import (
    Judge,
    JudgeAnswer,
)
from gymdata.ports.models import (
    Critic,
    PolicyModel,
)
from gymdata.ports.rollouts import (
    Chat,
    Conversation,
    Environment,
    Episode,
    FinishReason,
    Generation,
    Message,
    Progress,
    RemoteRequest,
    RemoteRollout,
    RewardFunction,
    RewardPart,
    Sampler,
    SampleRequest,
    StepResult,
    Task,
    Verdict,
    Workflow,
)
from gymdata.ports.training import (
    CollectOrder,
    Commands,
    JobState,
    JobStatus,
    Trainer,
    TrainerAdapter,
    TrainingJob,
    TrajectoryBuilder,
)

__all__ = [
    "Chat",
    "CollectOrder",
    "Commands",
    "Conversation",
    "Critic",
    "Environment",
    "Episode",
    "FinishReason",
    "Generation",
    "JobState",
    "JobStatus",
    "Judge",
    "JudgeAnswer",
    "Message",
    "PolicyModel",
    "Progress",
    "RemoteRequest",
    "RemoteRollout",
    "RewardFunction",
    "RewardPart",
    "SampleRequest",
    "Sampler",
    "StepResult",
    "Task",
    "Trainer",
    "TrainerAdapter",
    "TrainingJob",
    "TrajectoryBuilder",
    "Verdict",
    "Workflow",
]

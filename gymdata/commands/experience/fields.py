"""Which columns of the table fill the tensors of ``Experience``."""

#: Field of Experience → column of the table.
COLUMNS = {
    "action_log_probs": "logprobs",
    "base_action_log_probs": "ref_logprobs",
    "values": "values",
    "returns": "returns",
    "advantages": "advantages",
    "kl": "kl",
    "action_entropy": "entropy",
}
#: Columns that have no published field: in ``info`` under their own name.
BESIDE = ("rl_weight", "ce_weight", "ref_kl_weight", "teacher_logprobs")

"""What the policy thinks of a prompt: the log-prob of each of its tokens given those before it.

Raw, as vLLM gives them: temperature 1, no filters. The prompt is computed in pieces, so that the logits held at once
are those of one piece and not of the whole prompt.
"""

from __future__ import annotations

import numpy as np
import torch

from verifiers_trainer.engines.embedded.kv_cache import BatchCache
from verifiers_trainer.engines.embedded.model_inputs import ForwardPass
from verifiers_trainer.engines.requests import Alternatives, GenerationRequest, PromptLogprobs

_PIECE = 256


def score_prompt(forward: ForwardPass, request: GenerationRequest, device: torch.device) -> PromptLogprobs | None:
    """The log-probs that ``request`` asks for, by passes of their own; None when it asks for none."""
    count = request.params.prompt_logprobs
    if count is None:
        return None
    ids_P = torch.from_numpy(request.prompt_ids.astype(np.int64)).to(device)
    cache = BatchCache()
    pieces = []
    for begin in range(0, len(ids_P) - 1, _PIECE):
        inputs_T = ids_P[begin : min(begin + _PIECE, len(ids_P) - 1)]
        targets_T1 = ids_P[begin + 1 : begin + 1 + len(inputs_T)].unsqueeze(1)
        logp_TV = torch.log_softmax(forward.every_position(inputs_T.unsqueeze(0), cache)[0].float(), dim=-1)
        logp_T1 = logp_TV.gather(1, targets_T1)
        ranks_T = 1 + (logp_TV > logp_T1).sum(dim=1)
        top_logprobs, top_ids = logp_TV.topk(min(count, logp_TV.shape[1]), dim=-1)
        pieces.append([part.cpu().numpy() for part in (logp_T1.squeeze(1), ranks_T, top_ids, top_logprobs)])
    if not pieces:
        return PromptLogprobs(np.empty(0, np.float32), np.empty(0, np.int32), [])
    logprobs, ranks, top_ids_PK, top_logprobs_PK = (np.concatenate(column) for column in zip(*pieces, strict=True))
    best = [Alternatives(*pair) for pair in zip(top_ids_PK.astype(np.int32), top_logprobs_PK, strict=True)]
    return PromptLogprobs(logprobs, ranks.astype(np.int32), best if count else [])

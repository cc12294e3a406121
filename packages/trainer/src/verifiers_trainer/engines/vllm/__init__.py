"""A vLLM server, or several, as the trainer's inference engine: over HTTP only, vllm is never imported.

    features   what a server of a given version can do
    control    one server's control routes, each call with a deadline and a name
    probe      what the first completions must show before anything is trained on them
    engine     ``VLLMEngine``: the servers together, pushes and repairs; ``VersionedClient``: their completions, each
               with the policy version that sampled it

How weights get there is ``verifiers_trainer.engines.vllm.weights``'s; starting a server is ``vf-vllm``'s.
"""

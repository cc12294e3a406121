"""vLLM servers as the trainer's inference engine, over HTTP; vllm is never imported.

    features   the features of a server version
    control    the control routes of a server, each call with a deadline and a name
    probe      checks of the first completions, before training uses any
    engine     ``VLLMEngine``: weight pushes and repairs of all servers; ``VersionedClient``: their completions, each
               with the policy version that sampled it

``verifiers_trainer.engines.vllm.weights`` transfers the weights; ``vf-vllm`` starts a server.
"""

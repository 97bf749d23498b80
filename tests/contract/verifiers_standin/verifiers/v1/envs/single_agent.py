class SingleAgentEnv:
    pass

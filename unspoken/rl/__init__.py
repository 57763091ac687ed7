"""Reinforcement learning of latent models on TRL: rollouts by the recurrence, the policy scored by parallel passes."""

"""The best group size, pools of a fixed policy, and how many prompts an interval takes."""

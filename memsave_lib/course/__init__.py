"""What only the notebooks need: the environment check, the parameters, texts and the checks of exercises."""

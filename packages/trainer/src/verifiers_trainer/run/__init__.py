"""What a training run does beside the gradient: resume, evaluate, log, plot."""

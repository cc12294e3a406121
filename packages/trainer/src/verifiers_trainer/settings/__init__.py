"""The settings of a training run: fields, derived values, rules, other spellings."""

"""Taking away: steps, what a policy does not keep, what nobody needs."""

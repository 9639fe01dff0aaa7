"""A job of up to a thousand processes: Cairn's own code over a network and a bucket in memory."""

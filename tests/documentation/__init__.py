"""The documentation's pages as text: what they promise to cover, and what no test runs of them."""

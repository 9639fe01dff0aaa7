"""Programs that use Cairn the way its users do."""

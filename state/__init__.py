"""Training states, model classes and how they are placed, saved and loaded."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "base_module": ["EasyDeLBaseModule"],
        "config": ["AutoEasyDeLConfig", "EDPretrainedConfig"],
        "decoder": ["DecoderConfig", "DecoderForCausalLM"],
        "easydel_state": ["EasyDeLState"],
        "errors": [
            "ArgumentError",
            "ConfigError",
            "ConversionError",
            "NotInitializedError",
            "OptimizerError",
            "OptimizerNotFoundError",
            "ShardingError",
            "StateError",
            "TreeStructureError",
            "UnknownModelError",
        ],
        "loss": ["LossConfig"],
        "names": ["TaskType"],
        "optimizers": ["make_optimizer", "optimizer_from_description"],
        "outputs": ["CausalLMOutput"],
        "sharding": ["make_mesh"],
        "train_state": ["TrainState"],
    },
)

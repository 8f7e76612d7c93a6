"""GLM-4.7-Flash (HF ``Glm4MoeLite``): built as DeepSeek-V3 is."""

from pyrl_ext.models.deepseek_v3 import FAMILY as FAMILY

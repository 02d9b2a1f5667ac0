"""The build backend: setuptools, plus build requirements that depend on what the machine has.

A fixed list would download torch (several GB with its CUDA libraries) for every build, although
its headers are all that is needed and the torch that will be used is mostly installed already.
"""

import toolchain
from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (the hooks of PEP 517 and PEP 660)


def get_requires_for_build_wheel(config_settings=None):
    return [
        *build_meta.get_requires_for_build_wheel(config_settings),
        *toolchain.missing_requirements(),
    ]


def get_requires_for_build_editable(config_settings=None):
    return [
        *build_meta.get_requires_for_build_editable(config_settings),
        *toolchain.missing_requirements(),
    ]

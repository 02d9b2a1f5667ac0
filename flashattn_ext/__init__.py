from flashattn_ext import _library, layout, reference
from flashattn_ext.softmax import softmax, log_softmax
from flashattn_ext.random import reserve_rng, dropout_mask
from flashattn_ext.merge_states import merge_states
from flashattn_ext.flash_attention import flash_attention, flash_attention_varlen
from flashattn_ext.naive_attention import naive_attention

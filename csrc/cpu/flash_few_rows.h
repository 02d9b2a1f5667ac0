// Forward for a few rows of queries, as in decoding (flash_few_rows.cpp).
#pragma once

#include "core/problem.h"

namespace flashattn::cpu {

// Whether the rows that share a kv head are few, and keys and values can be read as they lie. Not
// for training, since backward wants the scores of a forward that multiplied in its own order; nor
// for packed sequences, of which some may be long: one gives the same bits alone and among others.
bool is_for_few_rows(const AttentionProblem& problem, const ForwardOutputs& outputs);

void flash_forward_few_rows(const AttentionProblem& problem, const ForwardOutputs& outputs);

}  // namespace flashattn::cpu

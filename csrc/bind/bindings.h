// SPDX-License-Identifier: Apache-2.0
// Each part of the module attnstore_vllm._native is bound in a file of its own.
#pragma once

#include <pybind11/pybind11.h>

void bind_checksum(pybind11::module_& m);
void bind_codec(pybind11::module_& m);
void bind_encoded(pybind11::module_& m);
void bind_rotator(pybind11::module_& m);
void bind_uring(pybind11::module_& m);

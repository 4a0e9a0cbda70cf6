// tinydecode._C: the entries of td_api.h as Python functions, through CPython's limited API.
//
// One binary serves every CPython >= 3.10 and every torch: nothing here knows either a tensor or a
// CUDA type. A function takes the numbers of its entry in order: pointers and integers as int,
// factors as float. ops/cuda.py is the only caller and has checked them. A non-zero result becomes
// a RuntimeError.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <type_traits>
#include <utility>

#include "td_api.h"

namespace {

template <typename T>
T from_python(PyObject* object) {
  if constexpr (std::is_pointer_v<T>) {
    return static_cast<T>(PyLong_AsVoidPtr(object));
  } else if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(PyFloat_AsDouble(object));
  } else {
    return static_cast<T>(PyLong_AsLongLong(object));
  }
}

// Converts the arguments, calls the entry, and hands its result to `finish`.
template <typename R, typename... P, size_t... I, typename F>
PyObject* convert_and_call(R (*entry)(P...), PyObject* const* args, Py_ssize_t count,
                           std::index_sequence<I...>, F finish) {
  if (count != static_cast<Py_ssize_t>(sizeof...(P))) {
    PyErr_Format(PyExc_TypeError, "expected %zd arguments, found %zd",
                 static_cast<Py_ssize_t>(sizeof...(P)), count);
    return nullptr;
  }
  const auto call = [&](P... values) -> PyObject* {
    return PyErr_Occurred() ? nullptr : finish(entry(values...));
  };
  return call(from_python<P>(args[I])...);
}

template <typename R, typename... P, typename F>
PyObject* call_entry(R (*entry)(P...), PyObject* const* args, Py_ssize_t count, F finish) {
  return convert_and_call(entry, args, count, std::index_sequence_for<P...>{}, finish);
}

#define TD_OP(name)                                                              \
  PyObject* name(PyObject*, PyObject* const* args, Py_ssize_t count) {           \
    return call_entry(td_##name, args, count, [](int error) -> PyObject* {       \
      if (error == 0) Py_RETURN_NONE;                                            \
      return PyErr_Format(PyExc_RuntimeError, "td_" #name ": %s (cudaError %d)", \
                          td_error_string(error), error);                        \
    });                                                                          \
  }

#define TD_NUMBER(name)                                                          \
  PyObject* name(PyObject*, PyObject* const* args, Py_ssize_t count) {           \
    return call_entry(td_##name, args, count,                                    \
                      [](int64_t value) { return PyLong_FromLongLong(value); }); \
  }

TD_OP(rms_norm)
TD_OP(add_rms_norm)
TD_OP(rope)
TD_OP(kv_append)
TD_OP(rope_kv_append)
TD_OP(silu_mul)
TD_OP(attention)
TD_OP(linear_qkv)
TD_OP(linear_add)
TD_OP(linear_gate_up)
TD_OP(linear_logits)
TD_OP(embed)
TD_OP(argmax)
TD_OP(sample)
TD_OP(distribution)
TD_OP(ngram)
TD_OP(draft_token)
TD_OP(accept)
TD_OP(accept_best)
TD_OP(read)
TD_NUMBER(attention_workspace)
TD_NUMBER(argmax_workspace)
TD_NUMBER(sample_workspace)
TD_NUMBER(ngram_workspace)
TD_NUMBER(accept_workspace)
TD_NUMBER(accept_best_workspace)
TD_NUMBER(abi_version)
TD_NUMBER(cuda_version)
TD_NUMBER(driver_version)

PyObject* archs(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return call_entry(td_archs, args, count, PyUnicode_FromString);
}

using Function = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

PyMethodDef entry(const char* name, Function function) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)),
          METH_FASTCALL, nullptr};
}

#define TD_ENTRY(name) entry(#name, name)

PyMethodDef methods[] = {
    TD_ENTRY(rms_norm),
    TD_ENTRY(add_rms_norm),
    TD_ENTRY(rope),
    TD_ENTRY(kv_append),
    TD_ENTRY(rope_kv_append),
    TD_ENTRY(silu_mul),
    TD_ENTRY(attention),
    TD_ENTRY(linear_qkv),
    TD_ENTRY(linear_add),
    TD_ENTRY(linear_gate_up),
    TD_ENTRY(linear_logits),
    TD_ENTRY(embed),
    TD_ENTRY(attention_workspace),
    TD_ENTRY(argmax),
    TD_ENTRY(argmax_workspace),
    TD_ENTRY(sample),
    TD_ENTRY(sample_workspace),
    TD_ENTRY(distribution),
    TD_ENTRY(ngram),
    TD_ENTRY(ngram_workspace),
    TD_ENTRY(draft_token),
    TD_ENTRY(accept),
    TD_ENTRY(accept_workspace),
    TD_ENTRY(accept_best),
    TD_ENTRY(accept_best_workspace),
    TD_ENTRY(read),
    TD_ENTRY(abi_version),
    TD_ENTRY(cuda_version),
    TD_ENTRY(driver_version),
    TD_ENTRY(archs),
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "tinydecode._C",
                          "The compiled kernels; see kernels/td_api.h.",
                          -1,
                          methods,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C(void) {
  PyObject* module = PyModule_Create(&definition);
  if (module != nullptr) PyModule_AddIntConstant(module, "ATTENTION_CHUNK", TD_ATTENTION_CHUNK);
  return module;
}

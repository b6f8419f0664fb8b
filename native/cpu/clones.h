// Functions that are compiled once for each set of vector instructions; the machine's own is chosen when the library is
// loaded. What such a function calls becomes part of it, so that it is compiled likewise.
#pragma once

// Not under sanitizers: the choice is made before they can run. AArch64's vector instructions are always there.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && !defined(PUTGET_STRESS) && \
    !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define PUTGET_CLONES [[gnu::target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4"), gnu::flatten]]
#else
#define PUTGET_CLONES
#endif

#include "textflag.h"

// func specialWords(dst *uint64, src *byte, n int) (or uint64)
//
// The 64 bytes of a word are looked at 16 at a time, with what every amd64
// has (SSE2): equal to the quote, equal to the backslash, or not changed by
// the lesser of itself and 0x1f.
TEXT ·specialWords(SB), NOSPLIT, $0-32
	MOVQ dst+0(FP), DI
	MOVQ src+8(FP), SI
	MOVQ n+16(FP), CX
	MOVQ $0x2222222222222222, AX
	MOVQ AX, X8
	PUNPCKLQDQ X8, X8
	MOVQ $0x5c5c5c5c5c5c5c5c, AX
	MOVQ AX, X9
	PUNPCKLQDQ X9, X9
	MOVQ $0x1f1f1f1f1f1f1f1f, AX
	MOVQ AX, X10
	PUNPCKLQDQ X10, X10
	PXOR X11, X11

#define SIXTEEN(at, to) \
	MOVOU at(SI), X0 \
	MOVO X0, X1 \
	MOVO X0, X2 \
	MOVO X0, X3 \
	POR X0, X11 \
	PCMPEQB X8, X1 \
	PCMPEQB X9, X2 \
	PMINUB X10, X3 \
	PCMPEQB X0, X3 \
	POR X1, X2 \
	POR X2, X3 \
	PMOVMSKB X3, to

loop:
	TESTQ CX, CX
	JZ done
	SIXTEEN(0, AX)
	SIXTEEN(16, BX)
	SIXTEEN(32, DX)
	SIXTEEN(48, R8)
	SHLQ $16, BX
	SHLQ $32, DX
	SHLQ $48, R8
	ORQ BX, AX
	ORQ R8, DX
	ORQ DX, AX
	MOVQ AX, (DI)
	ADDQ $64, SI
	ADDQ $8, DI
	DECQ CX
	JMP loop

done:
	MOVO X11, X0
	PUNPCKHQDQ X0, X0
	POR X11, X0
	MOVQ X0, AX
	MOVQ AX, or+24(FP)
	RET

// func highWords(src *byte, n int) (count int)
TEXT ·highWords(SB), NOSPLIT, $0-24
	MOVQ src+0(FP), SI
	MOVQ n+8(FP), CX
	MOVQ $0x0101010101010101, AX
	MOVQ AX, X6
	PUNPCKLQDQ X6, X6
	PXOR X5, X5
	PXOR X7, X7

next:
	TESTQ CX, CX
	JZ sum
	MOVOU 0(SI), X0
	MOVOU 16(SI), X1
	MOVOU 32(SI), X2
	MOVOU 48(SI), X3
	PSRLW $7, X0
	PSRLW $7, X1
	PSRLW $7, X2
	PSRLW $7, X3
	PAND X6, X0
	PAND X6, X1
	PAND X6, X2
	PAND X6, X3
	PADDB X1, X0
	PADDB X3, X2
	PADDB X2, X0
	PSADBW X5, X0
	PADDQ X0, X7
	ADDQ $64, SI
	DECQ CX
	JMP next

sum:
	MOVO X7, X0
	PUNPCKHQDQ X0, X0
	PADDQ X7, X0
	MOVQ X0, AX
	MOVQ AX, count+16(FP)
	RET

package proxy

import (
	"unsafe"

	"github.com/valyala/fasthttp"

	"github.com/penstock/penstock/wire"
)

// fasthttp asks once, with the head only, before it reads a body (HeaderReceived).
// Two things have to be done then, since it takes a buffer of the declared
// length before the first byte is there, and forgets the head when the body
// fails: bound the memory of bodies that are still coming, and read the head,
// so that an answer to a body that failed has the request's id on it as well.

// receiveFree is up to where a body is not counted: most are small, and the
// bound of connections bounds them.
const receiveFree = 64 << 10

// headerInCtx is where a request's head stands in its RequestCtx.
const headerInCtx = unsafe.Offsetof(fasthttp.RequestCtx{}.Request) + unsafe.Offsetof(fasthttp.Request{}.Header)

// connOf finds the connection of a head that fasthttp's server has read: it is
// part of the connection's RequestCtx, which the callback is not given.
// TestConnOf holds this and the version of fasthttp together.
func connOf(h *fasthttp.RequestHeader) *clientConn {
	ctx := (*fasthttp.RequestCtx)(unsafe.Add(unsafe.Pointer(h), -int(headerInCtx)))
	c, ok := ctx.Conn().(*clientConn)
	if !ok {
		panic("BUG: a connection that is not from the proxy's listener")
	}
	return c
}

// headerReceived is fasthttp's question before it reads a body.
func (p *Proxy) headerReceived(h *fasthttp.RequestHeader) fasthttp.RequestConfig {
	n := int64(h.ContentLength())
	if n == 0 || n == -2 {
		return fasthttp.RequestConfig{}
	}
	c := connOf(h)
	c.headErr, c.headRead = c.flight.load(h), true
	conf := fasthttp.RequestConfig{ReadTimeout: p.opt.BodyTimeout}
	if n < 0 || n > int64(p.opt.MaxBody) {
		n = int64(p.opt.MaxBody) // in chunks, or refused when it is read
	}
	if n > receiveFree {
		c.receiving.Store(n)
		if p.receiving.Add(n) > p.opt.ReceiveBytes {
			c.received()
			c.noRoom = true
			conf.MaxRequestBodySize = 1 // the reading ends at once, see handleError
		}
	}
	return conf
}

// received gives back what a body was counted for. It has come, or will not
// come any more.
func (c *clientConn) received() { c.p.receiving.Add(-c.receiving.Swap(0)) }

// head reads the head of the request, if it has not been read before its body.
func (c *clientConn) head(h *fasthttp.RequestHeader) *wire.Error {
	f := &c.flight
	if !c.headRead {
		return f.load(h)
	}
	c.headRead = false
	f.req.arrived = f.p.now() // whole: the time that the body took is the client's
	return c.headErr
}

func errNoRoom() *wire.Error {
	return wire.NewError(wire.CodeConcurrencyLimit, "the router receives as many large bodies as it takes")
}
